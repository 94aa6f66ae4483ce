"""`baton prefill`: one prefill worker process."""
