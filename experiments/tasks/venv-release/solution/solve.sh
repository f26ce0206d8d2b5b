#!/bin/bash
cd /app || exit 1

# make
python3 -m venv --without-pip env

# activate
source env/bin/activate

# install
cp -r vendor/greet env/lib/python3*/site-packages/

# mode
export GREET_MODE=release

# build
python build.py

# publish
python publish.py
