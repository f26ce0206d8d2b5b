#!/bin/bash
cd /app || exit 1

# import
git init -q -b main work && cd work && git config user.name Bot && git config user.email bot@example.org && git fast-import --done --quiet <../history.fi && git checkout -q feature

# rebase
git -C /app/work rebase -q main || git -C /app/work status --short

# config
printf 'name = shop\nport = 8080\nworkers = 4\n' >/app/work/config.ini; git -C /app/work add config.ini

# go on
GIT_EDITOR=true git -C /app/work rebase --continue || git -C /app/work status --short

# notes
printf 'first\nport 8080\nfour workers\n' >/app/work/notes.txt; git -C /app/work add notes.txt

# finish
GIT_EDITOR=true git -C /app/work rebase --continue

# tag
git -C /app/work tag ready
