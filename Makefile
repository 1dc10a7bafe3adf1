.PHONY: native
native:
	@scripts/build_native.sh
