#!/bin/bash
cd /app || exit 1

# stage
mkdir -p /app/stage; cd /app/stage

# umask
umask 027

# limit
ulimit -Sn 256

# epoch
export SOURCE_DATE_EPOCH=1700000000

# seal
/app/seal

# confirm
/app/confirm
