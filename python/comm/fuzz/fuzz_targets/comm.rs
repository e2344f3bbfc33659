//! What a peer of direct:// may send: a greeting, then messages. The first byte chooses, the second
//! says in which pieces the others arrive.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| _comm::fuzzed::feed(bytes));
