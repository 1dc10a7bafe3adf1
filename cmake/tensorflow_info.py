"""Prints, as KEY=VALUE lines for CMake, how to compile against this Python's TensorFlow."""

import glob
import os
import sys

from build_environment import environment_paths

try:
    import tensorflow as tf
except ImportError:
    # In pip's isolated build: the environment that is built for has it.
    sys.path += environment_paths()
    import tensorflow as tf

compile_flags = tf.sysconfig.get_compile_flags()
# The include path and the ABI become target properties; the standard is CMake's business.
options = [flag for flag in compile_flags if not flag.startswith(("-I", "--std", "-std", "-D_GLIBCXX_USE_CXX11_ABI"))]
libraries = sorted(glob.glob(os.path.join(tf.sysconfig.get_lib(), "libtensorflow_framework.so*")), key=len)
if not libraries:
    sys.exit(f"no libtensorflow_framework.so in {tf.sysconfig.get_lib()}")

print(f"SOK_TF_VERSION={tf.__version__}")
print(f"SOK_TF_GIT_VERSION={tf.version.GIT_VERSION}")
print(f"SOK_TF_CXX11_ABI={tf.sysconfig.CXX11_ABI_FLAG}")
print(f"SOK_TF_INCLUDE_DIR={tf.sysconfig.get_include()}")
print(f"SOK_TF_COMPILE_OPTIONS={' '.join(options)}")
print(f"SOK_TF_FRAMEWORK_LIBRARY={libraries[0]}")
print(f"SOK_TF_C_LIBRARY={os.path.join(tf.sysconfig.get_lib(), 'libtensorflow_cc.so.2')}")
