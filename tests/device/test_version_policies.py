"""Versions of files of tables on a GPU with policies: the tests of the CPU, run there."""

import pytest
import tensorflow as tf

import sok
from tests.sok import test_version_policies as of_the_cpu

from .conftest import GPU

few_rows_in_memory = of_the_cpu.few_rows_in_memory

test_versions = of_the_cpu.test_every_listed_version_is_what_an_ordinary_save_of_its_step_is
test_other_tables = of_the_cpu.test_a_version_goes_to_tables_without_policies_and_to_others
test_what_is_written = of_the_cpu.test_rows_that_were_only_counted_are_written_and_no_others
test_when_versions_begin = of_the_cpu.test_tables_keep_versions_before_and_after_they_have_rows
test_erased_keys = of_the_cpu.test_erased_keys_leave_a_version_with_their_histories


@pytest.fixture(autouse=True)
def on_the_gpu():
    sok.Init()
    with tf.device(GPU):
        yield
