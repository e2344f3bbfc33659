use std::sync::atomic::AtomicUsize;

use super::*;

#[test]
fn memory_is_used_again_when_its_block_is_gone_and_not_before() {
    let pool = Pool::new(&Limits::new(1 << 30));
    let mut first = pool.take(5 << 20).unwrap();
    first.bytes_mut().fill(7);
    let second = pool.take(5 << 20).unwrap();
    let (one, other) = (first.start(), second.start());
    assert_ne!(one, other);
    drop(first);
    let mut again = pool.take(5_000_000).unwrap();
    assert_eq!(again.start(), one, "blocks of similar size share a region");
    assert_eq!(again.len(), 5_000_000);
    again.bytes_mut().fill(1);
    assert_eq!(pool.kept(), 0);
}

#[test]
fn the_pool_keeps_no_more_than_its_limit_and_lets_the_oldest_go() {
    let pool = Pool::new(&Limits::new(3 << 20));
    let blocks: Vec<Block> = (0..5).map(|_| pool.take(1 << 20).unwrap()).collect();
    let newest = blocks[4].start();
    drop(blocks);
    assert_eq!(pool.kept(), 3 << 20);
    assert_eq!(pool.take(1 << 20).unwrap().start(), newest);
    drop(pool.take(4 << 20).unwrap());
    assert_eq!(pool.kept(), 3 << 20, "larger than the limit");
}

#[test]
fn what_nobody_uses_goes_back_to_the_system() {
    let pool = Pool::new(&Limits::new(1 << 30));
    drop(pool.take(1 << 20).unwrap());
    let now = Instant::now();
    assert!(pool.trim(now).is_some_and(|next| next <= now + KEEP));
    assert_eq!(pool.kept(), 1 << 20);
    assert_eq!(pool.trim(now + KEEP), None);
    assert_eq!(pool.kept(), 0);
}

/// A block that was replaced by a shared one, after some uses.
fn shared(pool: &Arc<Pool>, len: usize) -> Block {
    for _ in 0..3000 {
        let block = pool.take(len).unwrap();
        if block.shared().is_some() {
            return block;
        }
        drop(block);
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("it is still private");
}

#[test]
#[cfg_attr(miri, ignore = "Miri knows no memory that is shared")]
fn memory_that_is_used_again_and_again_becomes_shared_if_that_is_wanted() {
    let pool = Pool::new(&Limits::new(4 << 20));
    for _ in 0..5 {
        drop(pool.take(1 << 20).unwrap());
    }
    assert_eq!(pool.shared(), 0);
    pool.share();
    drop((pool.take(1 << 20), pool.take(1 << 20)));
    let block = shared(&pool, 1 << 20);
    assert!(pool.shared() <= 4 << 20);
    drop(block);
    pool.trim(Instant::now() + KEEP);
    assert_eq!((pool.kept(), pool.shared()), (0, 0), "it goes back to the system, too");
}

#[test]
#[cfg_attr(miri, ignore = "Miri knows no memory that is shared")]
fn memory_that_a_peer_may_still_write_is_never_used_again() {
    let pool = Pool::new(&Limits::new(4 << 20));
    let mut lent = pool.take_shared(1 << 20).unwrap();
    let other = pool.take_shared(1 << 20).unwrap();
    lent.lend(true);
    drop(lent);
    assert!(other.shared().is_none(), "nor any other memory beside it");
    let new = pool.take_shared(1 << 20).unwrap();
    assert!(new.shared().is_some());
    assert_eq!(pool.shared(), 3 << 20);
    drop(other);
    assert_eq!((pool.shared(), pool.kept()), (1 << 20, 0));
}

#[test]
#[cfg_attr(miri, ignore = "Miri knows no memory that is shared")]
fn where_no_more_may_be_shared_memory_is_private() {
    let pool = Pool::new(&Limits::new(1 << 20));
    let shared = pool.take_shared(1 << 20).unwrap();
    let private = pool.take_shared(1 << 20).unwrap();
    assert!(shared.shared().is_some() && private.shared().is_none());
}

#[test]
#[cfg_attr(miri, ignore = "Miri ends where there is no memory")]
fn more_than_there_is_is_an_error() {
    let pool = Pool::new(&Limits::new(1 << 30));
    assert!(pool.take(usize::MAX).is_err());
    assert!(pool.take(isize::MAX as usize).is_err());
    assert!(pool.take(0).unwrap().is_empty());
}

#[test]
fn regions_are_little_larger_than_asked_for() {
    for len in [POOLED, POOLED + 1, 100_000, (1 << 20) + 1, 200 << 20, (1 << 31) + 5] {
        let size = region_size(len).unwrap();
        assert!(
            size >= len && size.is_multiple_of(4096) && size - len <= (len / 8).max(4096),
            "{len}"
        );
    }
}

#[test]
fn a_process_that_has_as_much_as_it_may_keeps_nothing_and_what_it_has_too_much_of_goes_oldest_first()
 {
    let has = Arc::new(AtomicUsize::new(0));
    let resident = Arc::clone(&has);
    let limits = Limits::within(1 << 30, 100 << 20, move || resident.load(Ordering::Relaxed));
    let pool = Pool::new(&limits);
    let blocks: Vec<Block> = (0..4).map(|_| pool.take(4 << 20).unwrap()).collect();
    let newest = blocks[3].start();
    drop(blocks);
    assert_eq!(pool.kept(), 16 << 20);
    // Memory of another size would be too much.
    has.store(91 << 20, Ordering::Relaxed);
    let other = pool.take(16 << 20).unwrap();
    assert_eq!(pool.kept(), 8 << 20);
    let again = pool.take(4 << 20).unwrap();
    assert_eq!(again.start(), newest, "what is there already takes nothing");
    has.store(200 << 20, Ordering::Relaxed);
    drop((other, again));
    assert_eq!(pool.kept(), 0);
    // The limit itself may change.
    limits.set(1 << 30, usize::MAX);
    drop(pool.take(4 << 20).unwrap());
    assert_eq!(pool.kept(), 4 << 20);
    limits.set(2 << 20, usize::MAX);
    pool.free_up(0);
    assert_eq!(pool.kept(), 0);
}
