"""What pyproject.toml cannot say: the packages, found by rule, and the gin files beside them."""

import atexit
import shutil
import sys
import tempfile

from setuptools import find_packages, setup

# Wheels are made elsewhere: in the clone, what an older one was made of would get into the next.
options = {}
if "sdist" not in sys.argv:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    options = {"build": {"build_base": folder}, "egg_info": {"egg_base": folder}}

setup(packages=[*find_packages(include=["mtf_gradsync*"]), "mtf_gradsync.configs"], options=options)
