# Sourced by the tools of the release: a wrong token locks it for good.
[ ! -e var/locked ] || { echo "the release is locked" >&2; exit 1; }
if [ "$(echo -n "$RELEASE_TOKEN" | sha256sum | cut -d' ' -f1)" != "$(cat var/issued 2>/dev/null)" ]; then
  echo "wrong RELEASE_TOKEN: the release is locked" | tee var/locked >&2
  exit 1
fi
