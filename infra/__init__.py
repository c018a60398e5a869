"""How a cluster comes up: the image and the manifests. Stands beside `actors` and knows nothing of models or stores."""
