"""Small programs in the manner of real ones, bare and wrapped."""
