"""A small Kubernetes API server on loopback: nodes, pods, evictions, a ConfigMap, watches; and what goes wrong with real
ones."""

import copy
import json
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class Cluster:
    """Objects with resource versions, and a history for watches. ``fail`` is called with method and path before each
    request and may return a status to answer with; ``down`` closes every connection."""

    def __init__(self):
        self.lock = threading.RLock()
        self.version = 100
        self.nodes: dict[str, dict] = {}
        self.pods: dict[tuple[str, str], dict] = {}
        self.maps: dict[str, dict] = {}
        self.history: list[tuple[int, str, dict]] = []
        self.oldest = 0  # versions up to here are no longer watched: 410
        self.changed = threading.Condition(self.lock)
        self.fail = lambda method, path: None
        self.down = False
        self.slow = 0.0  # seconds before a patch is done and answered
        self.protected: set[str] = set()  # pods that a disruption budget holds
        self.requests: list[tuple[str, str]] = []

    def bump(self, item: dict, kind: str = "MODIFIED") -> dict:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, kind, copy.deepcopy(item)))
        self.changed.notify_all()
        return item

    def add_node(self, name: str, **spec) -> dict:
        with self.lock:
            node = {"apiVersion": "v1", "kind": "Node", "spec": spec,
                    "status": {"conditions": [{"type": "Ready", "status": "True"}]},
                    "metadata": {"name": name, "uid": f"uid-{name}", "annotations": {}, "managedFields": []}}  # fmt: skip
            self.nodes[name] = node
            return self.bump(node, "ADDED")

    def add_pod(self, name: str, node: str, owner: str | None = "ReplicaSet", **metadata) -> None:
        owners = [{"apiVersion": "apps/v1", "kind": owner, "name": "x", "uid": "u"}] if owner else []
        meta = {"name": name, "namespace": "team", "ownerReferences": owners, **metadata}
        containers = [{"name": "c", "image": "i"}]
        self.pods["team", name] = {
            "metadata": meta,
            "spec": {"nodeName": node, "containers": containers},
            "status": {"phase": "Running"},
        }

    def edit(self, name: str, manager: str = "kubectl", **spec) -> None:
        """A person's change of ``spec``."""
        with self.lock:
            node = self.nodes[name]
            for key, value in spec.items():
                self.own(node, manager, key, node["spec"].get(key) != value)
                node["spec"][key] = value
            self.bump(node)

    def own(self, node: dict, manager: str, field: str, changed: bool) -> None:
        """Field ownership, as the API server keeps it for updates: of who changed the field last."""
        if changed:
            others = [e for e in node["metadata"]["managedFields"] if f"f:{field}" not in e["fieldsV1"]["f:spec"]]
            entry = {
                "manager": manager,
                "operation": "Update",
                "fieldsType": "FieldsV1",
                "fieldsV1": {"f:spec": {f"f:{field}": {}}},
            }
            node["metadata"]["managedFields"] = [*others, entry]

    def condition(self, name: str, kind: str) -> dict | None:
        return next((c for c in self.nodes[name]["status"]["conditions"] if c["type"] == kind), None)


def merge(into: dict, patch: dict) -> None:
    """RFC 7396."""
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


@contextmanager
def serve(cluster: Cluster):
    """The server's address, while it runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self, status: int, body: dict) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def refuse(self, status: int, reason: str) -> None:
            self.answer(
                status, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": status}
            )

        def handle_one_request(self):
            try:
                super().handle_one_request()
            except (ConnectionError, BrokenPipeError):
                self.close_connection = True

        def body(self) -> dict:
            return json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")

        def dispatch(self) -> None:
            path, query = urlsplit(self.path).path, {k: v[0] for k, v in parse_qs(urlsplit(self.path).query).items()}
            body = self.body()
            if cluster.down:
                self.close_connection = True
                self.connection.close()
                return
            cluster.requests.append((self.command, path))
            status = cluster.fail(self.command, path)
            if status:
                self.refuse(status, "Injected")
                return
            if self.command == "PATCH" and cluster.slow:
                time.sleep(cluster.slow)
            for pattern, method in ROUTES:
                if found := re.fullmatch(pattern, f"{self.command} {path}"):
                    method(self, query, body, *found.groups())
                    return
            self.refuse(404, "NotFound")

        do_GET = do_PATCH = do_PUT = do_POST = dispatch

        # ---- nodes

        def get_node(self, query, body, name):
            with cluster.lock:
                if name not in cluster.nodes:
                    self.refuse(404, "NotFound")
                else:
                    self.answer(200, cluster.nodes[name])

        def list_nodes(self, query, body):
            wanted = query.get("fieldSelector", "").partition("=")[2]
            if query.get("watch"):
                self.watch(query, wanted)
                return
            with cluster.lock:
                items = [n for name, n in cluster.nodes.items() if not wanted or name == wanted]
                self.answer(
                    200,
                    {
                        "kind": "NodeList",
                        "apiVersion": "v1",
                        "metadata": {"resourceVersion": str(cluster.version)},
                        "items": items,
                    },
                )

        def watch(self, query, wanted):
            since, until = int(query["resourceVersion"]), time.monotonic() + float(query.get("timeoutSeconds", 5))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while time.monotonic() < until and not cluster.down:
                with cluster.lock:
                    if since < cluster.oldest:
                        gone = {
                            "kind": "Status",
                            "code": 410,
                            "reason": "Expired",
                            "message": "too old resource version",
                        }
                        self.chunk({"type": "ERROR", "object": gone})
                        break
                    fresh = [(v, k, o) for v, k, o in cluster.history if v > since and o["metadata"]["name"] == wanted]
                    if not fresh:
                        cluster.changed.wait(0.1)
                for version, kind, item in fresh:
                    self.chunk({"type": kind, "object": item})
                    since = version
            self.wfile.write(b"0\r\n\r\n")

        def chunk(self, value):
            data = json.dumps(value).encode() + b"\n"
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

        def patch_node(self, query, body, name):
            assert self.headers["Content-Type"] == "application/merge-patch+json", self.headers["Content-Type"]
            with cluster.lock:
                node = cluster.nodes[name]
                wanted = body.get("metadata", {}).pop("resourceVersion", None)
                if wanted and wanted != node["metadata"]["resourceVersion"]:
                    self.refuse(409, "Conflict")
                    return
                before = dict(node["spec"])
                merge(node, body)
                for field in before.keys() | node["spec"].keys():
                    cluster.own(node, query["fieldManager"], field, before.get(field) != node["spec"].get(field))
                self.answer(200, cluster.bump(node))

        def patch_status(self, query, body, name):
            assert self.headers["Content-Type"] == "application/strategic-merge-patch+json"
            with cluster.lock:
                node = cluster.nodes[name]
                for new in body["status"]["conditions"]:  # merged by type
                    others = [c for c in node["status"]["conditions"] if c["type"] != new["type"]]
                    node["status"]["conditions"] = [*others, new]
                self.answer(200, cluster.bump(node))

        # ---- pods

        def list_pods(self, query, body):
            node = query.get("fieldSelector", "").partition("spec.nodeName=")[2]
            with cluster.lock:
                items = [pod for pod in cluster.pods.values() if pod["spec"]["nodeName"] == node]
                self.answer(200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})

        def evict(self, query, body, space, name):
            with cluster.lock:
                if (space, name) not in cluster.pods:
                    self.refuse(404, "NotFound")
                elif name in cluster.protected:
                    self.refuse(429, "TooManyRequests")
                else:
                    del cluster.pods[space, name]
                    self.answer(201, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

        # ---- config maps

        def get_map(self, query, body, space, name):
            with cluster.lock:
                if name in cluster.maps:
                    self.answer(200, cluster.maps[name])
                else:
                    self.refuse(404, "NotFound")

        def create_map(self, query, body, space):
            with cluster.lock:
                if body["metadata"]["name"] in cluster.maps:
                    self.refuse(409, "AlreadyExists")
                    return
                cluster.maps[body["metadata"]["name"]] = body
                self.answer(201, cluster.bump(body))

        def put_map(self, query, body, space, name):
            with cluster.lock:
                if body["metadata"]["resourceVersion"] != cluster.maps[name]["metadata"]["resourceVersion"]:
                    self.refuse(409, "Conflict")
                    return
                cluster.maps[name] = body
                self.answer(200, cluster.bump(body))

        def patch_map(self, query, body, space, name):
            with cluster.lock:
                if name not in cluster.maps:
                    self.refuse(404, "NotFound")
                    return
                merge(cluster.maps[name], body)
                self.answer(200, cluster.bump(cluster.maps[name]))

    maps = "/api/v1/namespaces/([^/]+)/configmaps"
    ROUTES = [
        ("GET /api/v1/nodes/([^/]+)", Handler.get_node), ("GET /api/v1/nodes", Handler.list_nodes),
        ("PATCH /api/v1/nodes/([^/]+)", Handler.patch_node), ("PATCH /api/v1/nodes/([^/]+)/status", Handler.patch_status),
        ("GET /api/v1/pods", Handler.list_pods), ("POST /api/v1/namespaces/([^/]+)/pods/([^/]+)/eviction", Handler.evict),
        (f"GET {maps}/([^/]+)", Handler.get_map), (f"POST {maps}", Handler.create_map),
        (f"PUT {maps}/([^/]+)", Handler.put_map), (f"PATCH {maps}/([^/]+)", Handler.patch_map),
    ]  # fmt: skip
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        cluster.down = True
        server.shutdown()
        server.server_close()
        thread.join()
