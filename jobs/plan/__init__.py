"""Which rows there are, which unit each belongs to, and what makes two jobs the same."""
