"""The public model families: configs, tensor names, special ids. Tables and checks, without torch and without weights."""
