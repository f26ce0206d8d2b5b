#!/bin/bash
cd /app || exit 1

# start
mkfifo var/in; sqlite3 -batch :memory: <var/in >var/out 2>&1 & exec 7>var/in

# orders
./table orders >&7

# customers
./table customers >&7

# clean
echo 'DELETE FROM orders WHERE customer NOT IN (SELECT id FROM customers);' >&7

# report
echo 'CREATE TABLE report AS SELECT name, sum(amount) AS total FROM orders JOIN customers ON customer = id GROUP BY name;' >&7

# save
echo "VACUUM INTO 'var/out.db'; SELECT 'saved';" >&7; for _ in {1..100}; do grep -q saved var/out && break; sleep 0.05; done; cat var/out
