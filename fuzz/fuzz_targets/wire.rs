//! Messages between the native engine's processes: the first byte chooses the kind.
#![no_main]

use cuda_cluster::wire::frame::{decode, encode};
use cuda_cluster::wire::greeting::{Answer, Challenge, Welcome};
use cuda_cluster::wire::native::{FromClient, FromWorker, Registration, ToClient, ToWorker};
use cuda_cluster::wire::peer::{Header, Hello, Measure};
use cuda_cluster::wire::ranks::{Answer as Told, Greeted, Heard, LONGEST, Pmi, Session, greeted};
use cuda_cluster::wire::secret::Secret;
use cuda_cluster::wire::tasks::{Bulk, BulkReply, FromViewer, ToViewer};

/// No bytes make a reader panic, and what was read can be written and read again.
macro_rules! hold {
    ($bytes:expr, $kind:ty) => {
        if let Ok(message) = decode::<$kind>($bytes) {
            let frame = encode(&message).expect("what was read is short");
            let again = decode::<$kind>(&frame[4..]).expect("what was written can be read");
            assert_eq!(encode(&again).expect("as short"), frame);
        }
    };
}

/// No bytes make a session panic or keep more than it may.
fn talk(mut session: impl Session, bytes: &[u8]) {
    let mut read = bytes.to_vec();
    while let Ok(Some(heard)) = session.hear(&mut read) {
        if let Heard::Ask(_) = heard {
            assert!(session.answer(Told::Value(vec![b'x'; 9])).len() < LONGEST);
        }
    }
}

fn rank_of_rapids() -> impl Session {
    let mut hello = format!("AUTH rank=0 nranks=2 token={}\n", "07".repeat(32)).into_bytes();
    match greeted(&mut hello, 2, &Secret::new([7; 32])) {
        Ok(Some(Greeted::Rank(rank))) => rank,
        other => panic!("{other:?}"),
    }
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    match kind % 15 {
        0 => hold!(bytes, FromWorker),
        9 => hold!(bytes, FromClient),
        10 => hold!(bytes, Registration),
        11 => hold!(bytes, FromViewer),
        12 => hold!(bytes, ToViewer),
        13 => talk(Pmi::new(0, 2, 0, "job"), bytes),
        14 => talk(rank_of_rapids(), bytes),
        1 => hold!(bytes, ToWorker),
        2 => hold!(bytes, ToClient),
        3 => hold!(bytes, Bulk),
        4 => hold!(bytes, BulkReply),
        5 => hold!(bytes, Challenge),
        6 => hold!(bytes, Answer),
        7 => hold!(bytes, Welcome),
        _ => {
            if let Some(header) = Header::decode(bytes) {
                assert_eq!(&header.encode()[..], bytes);
            }
            let _ = (Hello::decode(bytes), Measure::decode(bytes));
        }
    }
});
