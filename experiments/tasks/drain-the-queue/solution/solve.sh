#!/bin/bash
cd /app || exit 1

# broker
./broker.py >var/log 2>&1 & ./wait-for 7024

# worker
./worker.py >var/worker 2>&1 & :

# night
./ask 7024 submit night; ./settle

# pause
./ask 7024 pause

# urgent
./ask 7024 submit urgent

# reverse
./ask 7024 reverse

# resume
./ask 7024 resume; ./settle

# drain
./ask 7024 drain
