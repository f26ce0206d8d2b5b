#!/bin/bash
cd /app || exit 1

# start
mkfifo var/in; ./debug & exec 7>var/in; for _ in {1..200}; do grep -q Pdb var/out 2>/dev/null && break; sleep 0.05; done

# break
echo 'b bill' >&7

# continue
echo c >&7; for _ in {1..200}; do [ ! -e items ] && break; sleep 0.05; done

# rate
echo 'rate = 3' >&7

# clear
echo 'clear 1' >&7

# finish
echo c >&7; for _ in {1..200}; do [ -s var/invoice ] && break; sleep 0.05; done
