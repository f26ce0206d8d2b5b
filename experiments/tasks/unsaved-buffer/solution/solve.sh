#!/bin/bash
cd /app || exit 1

# open
mkfifo var/in; ./open-draft & exec 7>var/in; for _ in {1..100}; do [ ! -e draft ] && break; sleep 0.05; done

# delete
echo 'g/TODO/d' >&7

# replace
echo ',s/colour/color/g' >&7

# append
printf '$a\n-- the end\n.\n' >&7

# write
printf 'w var/final\nQ\n' >&7; for _ in {1..100}; do [ -s var/final ] && break; sleep 0.05; done
