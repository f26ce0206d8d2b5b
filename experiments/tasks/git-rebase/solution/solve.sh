#!/bin/bash
cd /app || exit 1

# import
git init -q -b main repo && cd repo && git config user.name Bot && git config user.email bot@example.org && git fast-import --done --quiet <../history.fi && git checkout -q feature

# rebase
git -C /app/repo rebase -q main || git -C /app/repo status --short

# config
printf 'name = shop\nport = 8080\nworkers = 4\n' >/app/repo/config.ini; git -C /app/repo add config.ini

# go on
GIT_EDITOR=true git -C /app/repo rebase --continue || git -C /app/repo status --short

# notes
printf 'first\nport 8080\nfour workers\n' >/app/repo/notes.txt; git -C /app/repo add notes.txt

# finish
GIT_EDITOR=true git -C /app/repo rebase --continue

# tag
git -C /app/repo tag ready
