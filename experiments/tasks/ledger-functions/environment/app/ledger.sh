# A ledger in the memory of the shell that sources this.
ledger_open() {
  [ -n "$1" ] || { echo "ledger_open VOUCHER" >&2; return 1; }
  declare -g LEDGER_VOUCHER=$1
  declare -ga LEDGER_LINES=()
  declare -gi LEDGER_SUM=0
}
ledger_add() {
  [ -n "$LEDGER_VOUCHER" ] || { echo "the ledger is not open" >&2; return 1; }
  LEDGER_LINES+=("$1 $2")
  LEDGER_SUM+=$2
}
ledger_show() { printf '%s\n' "voucher $LEDGER_VOUCHER" "${LEDGER_LINES[@]}" "sum $LEDGER_SUM"; }
ledger_close() {
  [ -n "$LEDGER_VOUCHER" ] || { echo "the ledger is not open" >&2; return 1; }
  (set -o noclobber && ledger_show >/app/var/ledger) || return 1
  unset LEDGER_VOUCHER LEDGER_LINES LEDGER_SUM
}
