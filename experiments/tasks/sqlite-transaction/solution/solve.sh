#!/bin/bash
cd /app || exit 1

# database
sqlite3 bank.db <bank.sql

# open
coproc DB { sqlite3 -batch bank.db 2>&1; }; exec 5>&"${DB[1]}" 6<&"${DB[0]}"; echo 'BEGIN IMMEDIATE; SELECT 1;' >&5; read -r -t 10 _ <&6

# slip 1
./take-slip 1 >&5

# slip 2
./take-slip 2 >&5

# check
echo 'SELECT sum(balance) FROM accounts;' >&5; read -r -t 10 total <&6; [ "$total" = 1000 ]

# audit
echo "INSERT INTO audit VALUES ('batch', $total);" >&5

# commit
echo 'COMMIT; SELECT 1;' >&5; read -r -t 10 _ <&6; exec 5>&- 6<&-
