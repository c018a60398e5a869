"""draftmill decodes whole datasets with speculative and parallel decoders. See README.md.

Beside this file are links to the folders jobs, actors, decoders, storage and infra of the checkout, which a wheel holds as
folders: so their import names are draftmill.jobs and so on. docs/decisions/project.md says why.
"""

__version__ = "0.1.0"
