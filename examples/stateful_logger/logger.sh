#!/bin/sh
# A logger with a memory: it numbers the lines of its log, and counts errors. The numbers are nowhere but in this process.
#
#   logger.sh DIRECTORY    appends every line that is written to DIRECTORY/in to DIRECTORY/log
#                          the line "?" is answered on DIRECTORY/out
cd "$1" || exit
[ -p in ] || mkfifo in out
exec 3<>in 4<>out 5>>log
lines=0 errors=0
while IFS= read -r line <&3; do
  case $line in
    "?") echo "$lines lines, $errors errors" >&4; continue ;;
    error*) errors=$((errors + 1)) ;;
  esac
  lines=$((lines + 1))
  echo "$lines $line" >&5
done
