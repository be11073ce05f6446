"""Lists what processors send each other, on SIMD and on placement meshes."""
