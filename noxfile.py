"""The test suite on the Pythons and TensorFlows that the package promises: `make test-matrix`.

With `make test-t5`, T5's pipeline in an environment of its own.
"""

import nox

nox.options.reuse_existing_virtualenvs = True
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["tests", "newest"]

# The oldest TensorFlow, the last with Estimator and the newest, on Pythons that each set of
# constraints/ is for.
MATRIX = [
    ("3.11", "2.12"),
    ("3.10", "2.15"),
    ("3.11", "2.15"),
    ("3.11", "2.21"),
    ("3.12", "2.21"),
    ("3.13", "2.21"),
]
PYTEST = ["-n", "2", "--dist", "worksteal"]


@nox.session
@nox.parametrize(("python", "tensorflow"), MATRIX)
def tests(session: nox.Session, tensorflow: str) -> None:
    """Runs the tests on an exact set of packages; arguments after -- go to pytest."""
    constraints = f"constraints/tf-{tensorflow}.txt"
    session.install("-qq", "-c", constraints, "setuptools", "wheel")
    # No libtpu fits the jax that fits TensorFlow 2.12.
    extras = "train,examples,test,xla,islands" + ("" if tensorflow == "2.12" else ",tpu")
    session.install("-qq", "--no-build-isolation", "-c", constraints, "-e", f".[{extras}]")
    session.run("python", "-m", "pytest", *(session.posargs or PYTEST))


@nox.session(python="3.13")
def newest(session: nox.Session) -> None:
    """Runs the tests on what pip takes without any pins; arguments after -- go to pytest.

    On the newest Python that TensorFlow supports. Its short form is in .ci/run.
    """
    newest = ["--upgrade", "--upgrade-strategy", "eager"]
    session.install("-qq", *newest, "-e", ".[train,examples,test,xla,tpu,islands]")
    session.run("python", "-m", "pip", "list")
    session.run("python", "-m", "pytest", *(session.posargs or PYTEST))


# What T5's own code imports beside what this package needs. T5 0.9.4 also asks for torch and
# transformers, for a class that is not used here, and for two packages that are gone.
T5_NEEDS = ["babel", "rouge-score", "sacrebleu", "scikit-learn", "seqio", "sentencepiece"]


@nox.session(python="3.11")
def t5(session: nox.Session) -> None:
    """Runs T5's MtfModel and command with the wrappers; arguments after -- go to pytest."""
    constraints = ["-c", "constraints/t5.txt"]
    session.install("-qq", *constraints, "setuptools", "wheel")
    session.install("-qq", "--no-build-isolation", *constraints, "-e", ".[train,test]", *T5_NEEDS)
    session.install("-qq", "--no-deps", *constraints, "t5")
    session.run("python", "-m", "pytest", "tests/pipelines/test_t5.py", *session.posargs)
