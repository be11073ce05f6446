# For type checkers; at run time the name leads to the folder.
from mtf_gradsync.tools.islands import *
