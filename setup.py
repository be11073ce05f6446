"""What pyproject.toml cannot say: the packages, found by rule, and the gin files beside them."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["mtf_gradsync*"]), "mtf_gradsync.configs"])
