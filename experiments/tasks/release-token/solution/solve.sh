#!/bin/bash
cd /app || exit 1

# token
export RELEASE_TOKEN=$(./issue-token)

# region
export REGION=$(sed -n 's/^region=//p' app.conf)

# build
./build-image

# push
./push-image

# promote
./promote
