//! The store on real memory and real files.

use super::*;
use cuda_cluster_model::plan::HOST_FILL_PERCENT;

fn id(number: u64) -> ObjectId {
    ObjectId::new(1, number)
}

fn settings(directory: PathBuf) -> Settings {
    let (device_limit, host_limit, memory_limit, disk_limit) = (None, None, None, None);
    Settings { device_limit, host_limit, memory_limit, disk_limit, directory }
}

fn store(device: u64, host: u64, directory: &tempfile::TempDir) -> Arc<Store> {
    let directory = directory.path().to_path_buf();
    let settings = Settings { host_limit: Some(host), ..settings(directory) };
    Arc::new(Store::new(&settings, Some(Device::simulated("simulated", device)), None))
}

fn fill(store: &Store, object: u64, bytes: usize) {
    let consumer = store.enter();
    let mut buffer = store.allocate(&consumer, bytes).expect("room");
    let pattern = vec![u8::try_from(object).expect("small"); bytes];
    let Buffer::Device(memory) = &mut buffer else { panic!("there is a device") };
    memory.write(0, &pattern).expect("it fits");
    store.insert(&consumer, id(object), buffer).expect("room");
}

#[test]
fn ten_times_the_device_goes_through_all_levels_and_comes_back_whole() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = store(10_000, 30_000, &directory);
    for object in 0..100 {
        fill(&store, object, 1000);
    }
    let counters = store.counters();
    assert_eq!(counters.device.bytes, 10_000);
    assert!(counters.disk.bytes >= 60_000, "{counters:?}");
    for object in 0..100 {
        let pinned = store.open(&store.enter(), id(object)).expect("it is here");
        let expected = u8::try_from(object).expect("small");
        assert!(pinned.buffer().host().expect("simulated").iter().all(|b| *b == expected));
    }
    for object in 0..100 {
        store.remove(id(object));
    }
    let counters = store.counters();
    let left = counters.device.bytes + counters.host.bytes + counters.disk.bytes;
    assert_eq!(left, 0);
}

#[test]
fn what_is_in_use_does_not_make_room() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = store(1000, 10_000, &directory);
    fill(&store, 0, 900);
    let pinned = store.open(&store.enter(), id(0)).expect("it is here");
    let error = store.allocate(&store.enter(), 200).expect_err("all of it is in use");
    assert!(error.to_string().contains("no room for 200 bytes in device memory"), "{error}");
    drop(pinned);
    assert!(store.allocate(&store.enter(), 200).is_ok());
}

#[test]
fn many_threads_share_little_memory_and_find_every_byte() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = store(8_000, 8_000, &directory);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let store = Arc::clone(&store);
            scope.spawn(move || {
                for round in 0..40 {
                    let object = thread * 40 + round;
                    fill(&store, object, 500);
                    let before = id(thread * 40 + round / 2);
                    let pinned = store.open(&store.enter(), before).expect("it is here");
                    let expected = u8::try_from(thread * 40 + round / 2).expect("small");
                    let bytes = pinned.buffer().host().expect("simulated");
                    assert!(bytes.iter().all(|byte| *byte == expected));
                }
            });
        }
    });
    for object in 0..160 {
        let lent = store.lend(id(object)).expect("it is here");
        let expected = u8::try_from(object).expect("small");
        let mut bytes = vec![0; lent.len()];
        lent.read(0, &mut bytes).expect("as it was written");
        assert_eq!(bytes, [expected; 500]);
        drop(lent);
        store.remove(id(object));
    }
    let counters = store.counters();
    assert_eq!(counters.device.bytes + counters.host.bytes + counters.disk.bytes, 0);
}

#[test]
fn a_disk_that_refuses_is_an_error_and_nothing_is_lost() {
    let settings = Settings { host_limit: Some(1000), ..settings("/proc/nowhere".into()) };
    let device = Some(Device::simulated("simulated", 1000));
    let store = Arc::new(Store::new(&settings, device, None));
    fill(&store, 0, 900);
    let error = store.allocate(&store.enter(), 900).expect_err("nobody can make room");
    assert!(error.to_string().contains("/proc/nowhere"), "{error}");
    assert!(store.open(&store.enter(), id(0)).is_ok());
}

/// A task that needs what another one holds waits, and finds room once the other has ended.
#[test]
fn whoever_finds_no_room_waits_for_those_who_will_give_some_back() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = store(1000, 10_000, &directory);
    fill(&store, 0, 900);
    let first = store.enter();
    let pinned = store.open(&first, id(0)).expect("it is here");
    let second = std::thread::spawn({
        let store = Arc::clone(&store);
        move || store.allocate(&store.enter(), 200).is_ok()
    });
    drop(pinned);
    drop(first);
    assert!(second.join().expect("no panic"));
}

/// Memory with a reader counts as used until the reader drops it, and no longer.
#[test]
fn what_is_still_read_is_waited_for_and_not_taken() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = store(1000, 10_000, &directory);
    let consumer = store.enter();
    let buffer = store.allocate(&consumer, 900).expect("room");
    // Like a transfer whose caller has gone.
    drop(consumer);
    let waits = std::thread::spawn({
        let store = Arc::clone(&store);
        move || store.allocate(&store.enter(), 200).is_ok()
    });
    drop(buffer);
    assert!(waits.join().expect("no panic"));
}

/// What the process has resident besides data leaves less room for it, and the disk takes the rest.
#[test]
fn when_the_rest_of_the_process_grows_data_go_to_the_disk() {
    let directory = tempfile::tempdir().expect("a directory");
    let resident = process::resident_bytes(std::process::id()).expect("told");
    // Room for 64 MiB of data now; other tests' memory is in here, too.
    let memory_limit = Some((resident + (64 << 20)) * 100 / HOST_FILL_PERCENT);
    let settings = Settings { memory_limit, ..settings(directory.path().to_path_buf()) };
    let device = Device::simulated("simulated", 1 << 30);
    let store = Arc::new(Store::new(&settings, Some(device), None));
    for object in 0..10 {
        fill(&store, object, 4 << 20);
    }
    let grown = vec![1u8; 200 << 20];
    std::thread::sleep(std::time::Duration::from_millis(5));
    store.balance().expect("the disk has room");
    assert!(grown.iter().all(|byte| *byte == 1));
    assert_eq!(store.counters().disk.objects, 10);
    drop(grown);
    store.look_closely();
    assert!(store.open(&store.enter(), id(3)).is_ok());
}
