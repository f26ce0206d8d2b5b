#!/bin/bash
cd /app || exit 1

# start
./start-redis

# import
./import

# rank
redis-cli -p 7015 lrange orders 0 -1 | while read -r name amount; do echo "zincrby ranking $amount $name"; done | redis-cli -p 7015

# delete
redis-cli -p 7015 del orders

# winner
redis-cli -p 7015 set winner "$(redis-cli -p 7015 zrevrange ranking 0 0)"
