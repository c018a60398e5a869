"""The commands of draftmill, one file each."""
