"""A program that starts another one, says both numbers and waits."""

import os
import subprocess
import sys
import time

if __name__ == "__main__":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    print(f"started {os.getpid()} {child.pid}", flush=True)
    if sys.argv[1:] == ["fail"]:
        sys.exit("as asked")
    time.sleep(3600)
