#!/bin/bash
cd /app || exit 1

# start
./padd.py >var/log 2>&1 & ./wait-for 7020

# part 1
one=$(./decode 1); echo "$one"

# part 2
two=$(./decode 2); echo "$two"

# part 3
three=$(./decode 3); echo "$three"

# assemble
./assemble "$one" "$two" "$three"
