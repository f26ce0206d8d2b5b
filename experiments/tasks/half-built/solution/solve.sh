#!/bin/bash
cd /app || exit 1

# licence
export LICENCE=$(./checkout-licence)

# compiler
export CC=tcc

# generate
make generate

# objects
make objects

# link
make link

# package
make package
