"""Planning: finds the input rows, packs them into units, and computes the fingerprint that identifies a job."""
