"""Python code in a process of its own that has imported torch, but nothing of this package.

Importing torch takes seconds: one process does it, and each call gets a copy of that one.
"""

import atexit
import json
import subprocess
import sys
import tempfile
import threading

_SERVER = """
import json, os, sys, traceback
import torch

def child(code, environment, out, error):
    os.environ.update(environment)
    for number, path in ((0, os.devnull), (1, out), (2, error)):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY)
        os.dup2(file, number)
    torch.set_num_threads(1)
    status = 0
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        child(*json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
_servers = []  # the one that is there
_lock = threading.Lock()


def run(code, **environment):
    """Run `code`, with these variables of the environment besides, as subprocess.run([sys.executable, "-c", code]).

    Returns its subprocess.CompletedProcess, with what it printed as text. Raises AssertionError if it fails, with its
    exit status and what it printed to stderr.
    """
    with _lock, tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as error:
        if not _servers:
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            _servers.append(subprocess.Popen([sys.executable, "-c", _SERVER], **pipes))
            atexit.register(_servers[0].kill)
        server = _servers[0]
        server.stdin.write(json.dumps([code, environment, out.name, error.name]) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        done = subprocess.CompletedProcess(code, status, out.read(), error.read())
    assert status == 0, f"exit status {status}\n{done.stderr}"
    return done
