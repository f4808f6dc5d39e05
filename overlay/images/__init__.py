"""From wheels to images that can prove what they are, and from images to registries."""
