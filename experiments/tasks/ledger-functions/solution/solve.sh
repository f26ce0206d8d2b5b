#!/bin/bash
cd /app || exit 1

# source
source ledger.sh

# open
ledger_open "$(./voucher today)"

# rent
ledger_add rent 700

# food
ledger_add food 250

# travel
ledger_add travel 90

# close
ledger_close
