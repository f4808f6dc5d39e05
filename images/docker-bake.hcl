# Targets for all lines. What a line has of its own comes in a second file, which
# 'vllm-overlay image LINE --print' writes and names:
#
#   docker buildx bake -f images/docker-bake.hcl -f dist/images/LINE/bake.json image

target "common" {
  context    = "images"
  dockerfile = "Dockerfile"
  platforms  = ["linux/amd64"]
}

target "image" {
  inherits = ["common"]
  target   = "runtime"
}

# vLLM's wheel from the patched tree, for lines whose patches touch compiled sources
target "compile" {
  inherits = ["common"]
  target   = "compiled"
}

group "default" {
  targets = ["image"]
}
