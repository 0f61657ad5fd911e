//! Regions: which code may touch the bytes, and what the scope waits for. Small enough for miri.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use paramhub_transport::{BufferSlot, ReceiveRegion, SendRegion, StableBytes, lend};

#[test]
fn owned_buffers_come_back_with_what_was_received() {
    let mut region = ReceiveRegion::owned(vec![1.0_f32, 2.0]);
    let address = region.bytes().as_ptr();
    region.bytes_mut()[4..].copy_from_slice(&7.0_f32.to_le_bytes());
    let region = std::thread::spawn(move || {
        let mut region = region;
        region.bytes_mut()[..4].copy_from_slice(&5.0_f32.to_le_bytes());
        region
    })
    .join()
    .unwrap();
    assert_eq!(region.bytes().as_ptr(), address);
    assert_eq!(region.into_owned::<Vec<f32>>(), Some(vec![5.0, 7.0]));
}

#[test]
fn a_lent_buffer_is_returned_when_its_region_is_dropped() {
    let slot = BufferSlot::new(vec![1_u16, 2]);
    let mut region = ReceiveRegion::owned(slot.lend().unwrap());
    assert!(slot.lend().is_none() && slot.take().is_none(), "it is away");
    region.bytes_mut()[0] = 7;
    std::thread::spawn(move || drop(region)).join().unwrap();
    assert_eq!(slot.take(), Some(vec![7, 2]));
    // A slot that is gone before its buffer.
    let slot = BufferSlot::new(vec![0_u8]);
    let region = SendRegion::owned(slot.lend().unwrap());
    drop(slot);
    assert_eq!(region.bytes(), [0]);
}

#[test]
fn boxed_slices_and_every_element_width_work() {
    let region = SendRegion::owned(vec![0x0201_u16, 0x0403].into_boxed_slice());
    assert_eq!(region.bytes(), [1, 2, 3, 4]);
    assert_eq!(region.into_owned::<Box<[u16]>>().as_deref(), Some(&[0x0201, 0x0403][..]));
    let mut region = ReceiveRegion::owned(vec![0_u8; 3].into_boxed_slice());
    region.bytes_mut().fill(9);
    assert_eq!(region.into_owned::<Box<[u8]>>().as_deref(), Some(&[9, 9, 9][..]));
    assert!(SendRegion::owned(Vec::<f32>::new()).bytes().is_empty());
}

#[test]
fn another_type_gets_nothing() {
    assert_eq!(SendRegion::owned(vec![1_u8]).into_owned::<Vec<u16>>(), None);
    lend(|lending| assert_eq!(lending.send(&[1_u8]).into_owned::<Vec<u8>>(), None));
}

struct Pinned {
    bytes: Box<[u8; 4]>,
    dropped: mpsc::Sender<()>,
}

// SAFETY: the array is boxed, so its address does not change when the value moves; it is the value's alone,
// and any byte is valid.
unsafe impl StableBytes for Pinned {
    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..]
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..]
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.dropped.send(()).unwrap();
    }
}

#[test]
fn a_users_own_buffer_is_dropped_once() {
    let (dropped, drops) = mpsc::channel();
    let mut region = ReceiveRegion::owned(Pinned { bytes: Box::new([0; 4]), dropped: dropped.clone() });
    region.bytes_mut()[2] = 8;
    let back = region.into_owned::<Pinned>().unwrap();
    assert_eq!((drops.try_iter().count(), *back.bytes), (0, [0, 0, 8, 0]));
    drop(SendRegion::owned(back));
    assert_eq!(drops.try_iter().count(), 1);
}

#[test]
fn raw_memory_is_read_and_written_where_it_lies() {
    let mut memory = [1_u8, 2, 3, 4];
    let pointer = memory.as_mut_ptr();
    // SAFETY: the first half of an array that nothing else touches before the region is gone.
    let from = unsafe { SendRegion::from_raw(pointer, 2) };
    let second_half = pointer.wrapping_add(2);
    // SAFETY: the second half of that array.
    let mut into = unsafe { ReceiveRegion::from_raw(second_half, 2) };
    std::thread::spawn(move || into.bytes_mut().copy_from_slice(from.bytes())).join().unwrap();
    assert_eq!(memory, [1, 2, 1, 2]);
}

#[test]
fn null_is_fine_for_nothing_and_nothing_else() {
    // SAFETY: no byte is ever read.
    let empty = unsafe { SendRegion::from_raw(std::ptr::null(), 0) };
    assert!(empty.bytes().is_empty());
    // SAFETY: it panics before anything is read.
    let refused = catch_unwind(|| unsafe { ReceiveRegion::from_raw(std::ptr::null_mut(), 4) });
    assert!(refused.is_err());
}

#[test]
fn lent_slices_are_used_by_another_thread_and_seen_afterwards() {
    let gradient = [1.5_f32, -2.0, 3.0];
    let mut parameters = vec![0.0_f32; 3];
    let answer = lend(|lending| {
        let from = lending.send(&gradient);
        let also_from = lending.send(&gradient[1..]);
        let mut into = lending.receive(&mut parameters);
        std::thread::spawn(move || {
            into.bytes_mut().copy_from_slice(from.bytes());
            into.bytes_mut()[..4].copy_from_slice(&also_from.bytes()[4..]);
        });
        42
    });
    assert_eq!((answer, parameters), (42, vec![3.0, -2.0, 3.0]));
}

#[test]
fn the_scope_waits_for_a_region_on_another_thread() {
    let mut parameters = [0_u8; 8];
    let dropped: &AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
    lend(|lending| {
        let mut into = lending.receive(&mut parameters);
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            into.bytes_mut().fill(1);
            dropped.store(true, Ordering::SeqCst);
        });
    });
    assert!(dropped.load(Ordering::SeqCst), "lend returned while the region lived");
    assert_eq!(parameters, [1; 8]);
}

#[test]
fn a_panic_inside_the_scope_waits_too() {
    let mut parameters = [0_u8; 8];
    let dropped: &AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
    let panic = catch_unwind(AssertUnwindSafe(|| {
        lend(|lending| {
            // Dropped during the unwinding, so that the time in which a panic prints itself does not count.
            let (_unwinds, unwound) = mpsc::channel::<()>();
            let mut into = lending.receive(&mut parameters);
            std::thread::spawn(move || {
                let _ = unwound.recv();
                std::thread::sleep(Duration::from_millis(50));
                into.bytes_mut().fill(1);
                dropped.store(true, Ordering::SeqCst);
            });
            panic!("the user's code");
        })
    }));
    assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"the user's code"));
    assert!(dropped.load(Ordering::SeqCst), "lend unwound while the region lived");
    assert_eq!(parameters, [1; 8]);
}

#[test]
fn a_leaked_region_keeps_the_scope_from_returning() {
    let (returned, returns) = mpsc::channel();
    // The thread never ends; the process does.
    std::thread::spawn(move || {
        let gradient = vec![1.0_f32; 4];
        lend(|lending| std::mem::forget(lending.send(&gradient)));
        returned.send(()).unwrap();
    });
    assert_eq!(returns.recv_timeout(Duration::from_millis(200)), Err(mpsc::RecvTimeoutError::Timeout));
}

#[test]
fn scopes_nest() {
    let mut outer = [0_u8; 2];
    lend(|outside| {
        let mut into = outside.receive(&mut outer);
        let inner = [7_u8, 8];
        lend(|inside| {
            let from = inside.send(&inner);
            into.bytes_mut().copy_from_slice(from.bytes());
        });
    });
    assert_eq!(outer, [7, 8]);
}

#[test]
fn regions_are_sent_between_threads() {
    fn is_send<T: Send>() {}
    is_send::<SendRegion>();
    is_send::<ReceiveRegion>();
}
