"""From a pin to a base tree: releases, downloads, archives, the cache."""
