//! Numbers that look random, the same for the same seed. Not for secrets.

/// The number that follows this one: Marsaglia's xorshift64, which begins with any number but 0.
pub(crate) fn following(number: u64) -> u64 {
    let number = number ^ (number << 13);
    let number = number ^ (number >> 7);
    number ^ (number << 17)
}
