//! The stand-in behaves as the driver does where our launchers could notice. (`scripts/cuda-on-cpu
//! --selftest` tests its execution of kernels.)

use kernels::cuda::{CudaError, CudaEvent, CudaStream, DeviceVec};

use crate::support::{device, is_stand_in, stream};

#[test]
fn numbers_come_back_from_the_device_as_they_went() {
    let Some(stream) = stream() else { return };
    let sent: Vec<u32> = (0..1000).collect();
    let there = DeviceVec::from_slice(&stream, &sent).unwrap();
    let mut middle = [0; 10];
    stream.download(&there, 500, &mut middle).unwrap();
    assert_eq!(middle[..], sent[500..510]);
}

#[test]
fn the_host_may_reuse_a_slice_as_soon_as_its_upload_is_enqueued() {
    let Some(stream) = stream() else { return };
    let mut sent = vec![7u32; 1 << 20];
    let there = DeviceVec::from_slice(&stream, &sent).unwrap();
    sent.fill(8);
    assert!(there.to_vec(&stream).unwrap().iter().all(|&number| number == 7));
}

#[test]
fn a_stream_waits_for_an_event_of_another() {
    let Some(stream) = stream() else { return };
    let other = CudaStream::new(stream.cuda()).unwrap();
    let from = DeviceVec::from_slice(&stream, &vec![3u8; 16 << 20]).unwrap();
    let mut to = DeviceVec::zeroed(&other, from.len()).unwrap();
    let uploaded = CudaEvent::new(stream.cuda()).unwrap();
    uploaded.record(&stream).unwrap();
    other.wait(&uploaded).unwrap();
    other.copy(&from, 0, &mut to, 0, from.len()).unwrap();
    assert!(to.to_vec(&other).unwrap().iter().all(|&number| number == 3));
}

#[test]
fn more_memory_than_the_device_has_is_refused_with_what_is_free() {
    let Some(cuda) = device() else { return };
    let bytes = cuda.info().memory_bytes + 1;
    let refused = DeviceVec::<u8>::new(&cuda, bytes).unwrap_err();
    let CudaError::OutOfMemory { bytes: asked, free_bytes } = refused else { panic!("{refused}") };
    assert_eq!(asked, bytes);
    assert!(free_bytes < bytes);
}

#[test]
fn fresh_memory_of_the_stand_in_is_poisoned() {
    let Some(stream) = stream() else { return };
    if !is_stand_in(stream.cuda()) {
        eprintln!("skipped: a GPU's fresh memory holds anything");
        return;
    }
    let fresh = DeviceVec::<f32>::new(stream.cuda(), 1000).unwrap();
    assert!(fresh.to_vec(&stream).unwrap().iter().all(|number| number.is_nan()));
}
