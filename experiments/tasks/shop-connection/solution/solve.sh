#!/bin/bash
cd /app || exit 1

# start
./shop.py >var/log 2>&1 & for _ in {1..200}; do [ -e var/ready ] && break; sleep 0.05; done

# connect
exec 4<>/dev/tcp/127.0.0.1/7019

# auth
./send "AUTH $(./code today)" <&4 >&4

# widgets
./send 'ADD widget 3' <&4 >&4

# gears
./send 'ADD gear 2' <&4 >&4

# checkout
./send CHECKOUT <&4 >&4
