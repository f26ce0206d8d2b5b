#!/bin/bash
cd /app || exit 1

# open
exec 5<app.log

# header
read -r header <&5

# rotate
./rotate

# archive
./archive "$header" <&5

# close
exec 5<&-; touch var/done
