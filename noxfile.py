"""The test suite on the TensorFlow versions that the package promises: `make test-matrix`."""

import nox

nox.options.reuse_existing_virtualenvs = True
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True

# The oldest, the default and the newest. Each has an exact set of versions for Python 3.11.
TENSORFLOWS = ["2.12", "2.15", "2.21"]


@nox.session(python="3.11")
@nox.parametrize("tensorflow", TENSORFLOWS)
def tests(session: nox.Session, tensorflow: str) -> None:
    """Runs the tests; arguments after -- go to pytest."""
    constraints = f"constraints/tf-{tensorflow}.txt"
    session.install("-qq", "-c", constraints, "setuptools")
    # No libtpu fits the jax that fits TensorFlow 2.12.
    extras = "train,examples,test,xla" + ("" if tensorflow == "2.12" else ",tpu")
    session.install("-qq", "--no-build-isolation", "-c", constraints, "-e", f".[{extras}]")
    session.run("python", "-m", "pytest", *(session.posargs or ["-n", "2", "--dist", "worksteal"]))
