//! YAML and JSON: the reader is chosen by the seeds, because it is recognised from the content.
#![no_main]

mod laws;

libfuzzer_sys::fuzz_target!(|text: &str| laws::hold(text));
