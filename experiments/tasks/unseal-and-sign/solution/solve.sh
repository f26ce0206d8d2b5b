#!/bin/bash
cd /app || exit 1

# start
./keyd.py >var/log 2>&1 & ./wait-for 7014

# share 1
./ask 7014 unseal "$(./share 1)"

# share 2
./ask 7014 unseal "$(./share 2)"

# share 3
./ask 7014 unseal "$(./share 3)"

# sign
signature=$(./ask 7014 sign artifact)

# publish
./publish "$signature"
