"""Jobs on a remote cluster through Ray's job API: what is shipped, under which name, how it is followed and stopped."""
