"""Servers, with state that is only in their memory."""

from __future__ import annotations

from statefork.testing.fidelity.case import Case, ShellCase

__all__ = ["SERVERS"]

_NEEDS = frozenset({"shell", "files", "processes", "memory", "network"})


def _server(
    name: str,
    summary: str,
    *,
    make: str,
    ready: str,
    same: str,
    spoil: str,
    use: str,
    programs: tuple[str, ...],
    packages: tuple[str, ...],
    modules: tuple[str, ...] = (),
) -> Case:
    here = "mkdir -p /var/tmp/srv && cd /var/tmp/srv && "
    wait = f"for i in {{1..600}}; do {{ {ready}; }} >/dev/null 2>&1 && break; sleep 0.05; done"
    return ShellCase(
        name, summary, make=(f"{here}{{ {make}\n}}", wait), same=same, spoil=spoil, use=use, kind="programs",
        needs=_NEEDS, programs=programs, packages=packages, modules=modules,
    )  # fmt: skip


_FASTAPI = """
cat >app.py <<'PY'
from fastapi import FastAPI
app = FastAPI()
items = {}
@app.put("/items/{name}")
def put(name: str, value: int):
    items[name] = value
    return items
@app.get("/items")
async def get():
    return items
PY
$(for p in /usr/bin/python3 python3; do $p -c 'import uvicorn, fastapi' && echo $p && break; done) -m uvicorn app:app --port 8010 >log 2>&1 &"""

_NODE = """
mkdir -p watched
cat >server.js <<'JS'
const http = require('http'), fs = require('fs');
let hits = 0, ticks = 0, seen = [];
setInterval(() => { ticks++ }, 10);
fs.watch('watched', (_, name) => seen.push(name));
http.createServer((request, response) => {
  if (request.url == '/hit') hits++;
  if (request.url == '/ticks') return response.end(String(ticks));
  response.end(JSON.stringify({hits, seen: [...new Set(seen)]}));
}).listen(8020, '127.0.0.1');
JS
node server.js >log 2>&1 &"""

_NGINX = """
mkdir -p html logs && echo hello >html/index.html
printf '%s\\n' 'user root;' 'worker_processes 2;' 'daemon off;' 'pid logs/pid;' 'error_log logs/error;' 'events {}' \
  'http { access_log logs/access; client_body_temp_path t1; proxy_temp_path t2; fastcgi_temp_path t3; uwsgi_temp_path t4;' \
  'scgi_temp_path t5; server { listen 8030; root html; } }' >conf
nginx -p $PWD -c conf >log 2>&1 &"""

_POSTGRES = """
export PATH=$(ls -d /usr/lib/postgresql/*/bin | tail -1):$PATH PGHOST=/var/tmp/srv PGUSER=postgres
chown postgres . && su postgres -s /bin/sh -c "PATH=$PATH; initdb -D data -N -A trust -U postgres --no-locale" >log 2>&1
su postgres -s /bin/sh -c "PATH=$PATH; exec postgres -D data -c fsync=off -c listen_addresses='' -k /var/tmp/srv" >>log 2>&1 &"""

_JAVA = """
cat >Counter.java <<'JAVA'
import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicInteger;
public class Counter {
  public static void main(String[] args) throws Exception {
    AtomicInteger hits = new AtomicInteger();
    ConcurrentHashMap<String, byte[]> heap = new ConcurrentHashMap<>();
    for (int i = 0; i < 50; i++) heap.put("k" + i, new byte[10000]);
    Executors.newScheduledThreadPool(2).scheduleAtFixedRate(System::gc, 1, 500, TimeUnit.MILLISECONDS);
    HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", 8040), 0);
    server.setExecutor(Executors.newFixedThreadPool(4));
    server.createContext("/", exchange -> {
      int n = exchange.getRequestURI().getPath().equals("/hit") ? hits.incrementAndGet() : hits.get();
      byte[] body = (n + " " + heap.size() + "\\n").getBytes();
      exchange.sendResponseHeaders(200, body.length);
      exchange.getResponseBody().write(body);
      exchange.close();
    });
    server.start();
  }
}
JAVA
java -Xmx128m -Xshare:auto Counter.java >log 2>&1 &"""

_PSQL = "psql -qAtX"

SERVERS: tuple[Case, ...] = (
    _server(
        "python-http-server", "python -m http.server", programs=("python3", "curl"), packages=("python3", "curl"),
        make="echo page >index.html; python3 -m http.server 8000 >log 2>&1 &", ready="curl -sf localhost:8000",
        same="curl -sf localhost:8000; pgrep -f http.server", spoil="pkill -f http.server; wait",
        use="echo new >/var/tmp/srv/new; [ $(curl -sf localhost:8000/new) = new ]",
    ),
    _server(
        "fastapi", "a FastAPI app under uvicorn with in-memory state", programs=("python3", "curl"),
        modules=("fastapi", "uvicorn"), packages=("python3-fastapi", "python3-uvicorn", "curl"),
        make=_FASTAPI, ready="curl -sf -X PUT 'localhost:8010/items/a?value=1'",
        same="curl -sf localhost:8010/items", spoil="curl -sf -X PUT 'localhost:8010/items/a?value=2'",
        use="[ \"$(curl -sf -X PUT 'localhost:8010/items/b?value=3')\" = '{\"a\":1,\"b\":3}' ]",
    ),
    _server(
        "node", "a Node HTTP server with timers and a file watcher", programs=("node", "curl"), packages=("nodejs", "curl"),
        make=_NODE, ready="curl -sf localhost:8020/hit", same="curl -sf localhost:8020/", spoil="curl -sf localhost:8020/hit",
        use="a=$(curl -sf localhost:8020/ticks); touch /var/tmp/srv/watched/new; until curl -sf localhost:8020/ | grep -q "
        "'\"new\"' && [ $(curl -sf localhost:8020/ticks) -gt $a ]; do sleep 0.02; done",
    ),
    _server(
        "redis", "Redis with unsaved keys", programs=("redis-server", "redis-cli"), packages=("redis-server",),
        make="redis-server --port 6400 --save '' --dir /var/tmp/srv >log 2>&1 &",
        ready="redis-cli -p 6400 set key unsaved && redis-cli -p 6400 expire key 5000 && redis-cli -p 6400 rpush list a b c",
        same="redis-cli -p 6400 get key; redis-cli -p 6400 lrange list 0 2; [ $(redis-cli -p 6400 ttl key) -gt 4000 ] && echo ttl",
        spoil="redis-cli -p 6400 flushall",
        use="redis-cli -p 6400 incr n && [ \"$(redis-cli -p 6400 lpop list)\" = a ]",
    ),
    ShellCase(
        "postgresql", "PostgreSQL with an open transaction and dirty buffers", kind="programs", needs=_NEEDS,
        programs=("psql", "su"), packages=("postgresql",),
        make=(
            f"mkdir -p /var/tmp/srv && cd /var/tmp/srv && {{ {_POSTGRES}\n}}",
            f"for i in {{1..600}}; do {_PSQL} -c 'select 1' >/dev/null 2>&1 && break; sleep 0.05; done",
            f"{_PSQL} -c 'create table t as select generate_series(1, 20000) n' && coproc TX {{ {_PSQL} 2>&1; }}",
            "echo \"begin; insert into t values (-1); select 'ready';\" >&${TX[1]}; read -r word <&${TX[0]}; [ $word = ready ]",
        ),
        same=f"{_PSQL} -c 'select count(*), min(n) from t'; {_PSQL} -c \"select state from pg_stat_activity where state like 'idle in%'\"",
        spoil="echo 'rollback;' >&${TX[1]}; " + f"{_PSQL} -c 'insert into t values (5)'",
        use="echo \"commit; select 'done';\" >&${TX[1]}; read -r word <&${TX[0]}; [ $word = done ]; "
        f"[ \"$({_PSQL} -c 'select count(*), min(n) from t')\" = '20001|-1' ]; {_PSQL} -c 'checkpoint'",
    ),
    _server(
        "nginx", "nginx with its workers", programs=("nginx", "curl"), packages=("nginx-light", "curl"),
        make=_NGINX, ready="curl -sf localhost:8030", same="curl -sf localhost:8030; pgrep -c nginx; wc -l </var/tmp/srv/log",
        spoil="nginx -p /var/tmp/srv -c conf -s quit; wait",
        use="echo changed >/var/tmp/srv/html/index.html; [ $(curl -sf localhost:8030) = changed ]; old=$(pgrep -n nginx); "
        "nginx -p /var/tmp/srv -c conf -s reload; until [ $(pgrep -n nginx) != $old ]; do sleep 0.02; done; curl -sf localhost:8030",
    ),
    _server(
        "jvm", "a JVM program with several threads and a running collector", programs=("java", "curl"),
        packages=("default-jdk-headless", "curl"), make=_JAVA, ready="curl -sf localhost:8040/hit",
        same="curl -sf localhost:8040/", spoil="curl -sf localhost:8040/hit",
        use="[ \"$(curl -sf localhost:8040/hit)\" = '2 50' ]",
    ),
)  # fmt: skip
