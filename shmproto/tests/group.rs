//! A device group over a real region: calls, limits, and a leader that writes anything.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "a group that cannot be set up has failed")]

use std::{os::fd::OwnedFd, thread, time::Duration};

use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use shmproto::{
    group::{
        DEPTH, GroupCall, GroupGeometry, GroupLeader, GroupMember, GroupViolation, GroupWork, JoinGroupError,
        LAYOUT_HASH, WeightSplit,
        startup::{
            FromMember, GroupLoading, LeaderEnd, MemberEnd, MemberError, MemberHello, MemberLoaded,
            ServeGroup, ToMember,
        },
    },
    layer::{SiteOp, SitePath},
    region::{Access, Region},
};

const GEOMETRY: GroupGeometry = GroupGeometry { members: 2, input_values: 64, output_values: 32 };

const SPIN: Duration = Duration::from_micros(50);

/// Offsets of the first member's count of posted calls and of its first call, in words.
const POSTED: usize = 16;
const FIRST_CALL: usize = 16 + 2 * 16;

fn leader() -> GroupLeader {
    GroupLeader::create(GEOMETRY, SPIN).unwrap()
}

fn fd(leader: &GroupLeader) -> OwnedFd {
    leader.fd().unwrap().try_clone_to_owned().unwrap()
}

fn member(leader: &GroupLeader, index: u32) -> GroupMember {
    GroupMember::join(fd(leader), GEOMETRY, index, SPIN).unwrap()
}

fn forward(rows: u32) -> GroupCall {
    let work = GroupWork::Evaluate { part: None, op: SiteOp::Forward, path: SitePath::Fast };
    GroupCall { site: 3, work, rows, input: 0, output: 16, after: None }
}

#[test]
fn members_of_a_real_region_answer_many_calls_and_sleep_between_them() {
    let mut leader = leader();
    let serve = |index| {
        let mut member = member(&leader, index);
        thread::spawn(move || {
            let mut calls = 0;
            while let Some(call) = member.next_call().unwrap() {
                let mut row = [0.0; 3];
                member.read_inputs(call.input, &mut row).unwrap();
                member.write_outputs(call.output, &row.map(|x| x * (index + 2) as f32)).unwrap();
                member.finish();
                calls += 1;
            }
            calls
        })
    };
    let threads = [serve(0), serve(1)];
    for round in 0..3000u16 {
        if round % 1000 == 999 {
            thread::sleep(Duration::from_millis(2));
        }
        let row = [f32::from(round), -1.5, f32::NAN];
        leader.write_inputs(0, &row);
        let posted = [0, 1].map(|member| leader.post(member, &forward(1)));
        for (member, calls) in posted.into_iter().enumerate() {
            leader.wait(calls);
            let mut out = [0.0; 2];
            leader.read_outputs(member, 16, &mut out);
            assert_eq!(out, [row[0] * (member + 2) as f32, row[1] * (member + 2) as f32]);
        }
    }
    drop(leader);
    assert_eq!(threads.map(|thread| thread.join().unwrap()), [3000, 3000]);
}

#[test]
fn a_call_arrives_as_it_was_posted() {
    let mut leader = leader();
    let mut member = member(&leader, 0);
    let after = leader.post(1, &forward(7));
    let work = GroupWork::Evaluate { part: Some(2), op: SiteOp::Backward, path: SitePath::Linear };
    let rows = GroupCall { work: GroupWork::ReadRows, ..forward(9) };
    for call in [GroupCall { work, after: None, ..forward(5) }, rows] {
        leader.post(0, &call);
        assert_eq!(member.next_call().unwrap(), Some(call));
        member.finish();
    }
    assert_eq!(after.count, 1);
}

#[test]
fn values_outside_of_the_areas_are_refused() {
    let leader = leader();
    let member = member(&leader, 1);
    let mut values = [0.0; 32];
    for (first, count) in [(48, 17), (8, 1), (usize::MAX - 15, 32), (64, 1)] {
        let refused = member.read_inputs(first, &mut values[..count]).unwrap_err();
        assert!(matches!(refused, GroupViolation::Place { .. }), "{first} {count}: {refused}");
        assert!(member.write_inputs(first, &values[..count]).is_err());
    }
    assert!(member.read_outputs(16, &mut values[..17]).is_err());
    assert!(member.write_outputs(32, &values[..1]).is_err());
    assert!(
        member.write_outputs(16, &values[..16]).is_ok() && member.read_inputs(48, &mut values[..16]).is_ok()
    );
}

#[test]
fn a_region_of_another_size_or_layout_is_refused() {
    let leader = leader();
    let join = |geometry, index| GroupMember::join(fd(&leader), geometry, index, SPIN);
    assert!(matches!(join(GEOMETRY, 2), Err(JoinGroupError::Member(2))));
    let other = GroupGeometry { members: 1, ..GEOMETRY };
    assert!(matches!(join(other, 0), Err(JoinGroupError::Region(_))));
    for wrong in [
        GroupGeometry { members: 0, ..GEOMETRY },
        GroupGeometry { members: 16, ..GEOMETRY },
        GroupGeometry { input_values: 0, ..GEOMETRY },
        GroupGeometry { output_values: 24, ..GEOMETRY },
    ] {
        assert!(matches!(join(wrong, 0), Err(JoinGroupError::Geometry(_))), "{wrong:?}");
        assert!(GroupLeader::create(wrong, SPIN).is_err());
    }
    let region = Region::map(fd(&leader), 1..=1 << 20, Access::ReadWrite).unwrap();
    region.words()[2].store(1, std::sync::atomic::Ordering::Relaxed);
    assert!(matches!(join(GEOMETRY, 0), Err(JoinGroupError::Layout)));
}

#[test]
#[should_panic(expected = "at most 16 calls at once")]
fn a_leader_that_floods_a_member_has_made_a_mistake() {
    let mut leader = leader();
    for _ in 0..=DEPTH {
        leader.post(0, &forward(1));
    }
}

proptest! {
    #[test]
    fn a_leader_that_writes_anything_gets_no_panic(words in proptest::array::uniform12(any::<u32>()), posted in 1u32..40) {
        let leader = leader();
        let region = Region::map(fd(&leader), 1..=1 << 20, Access::ReadWrite).unwrap();
        let relaxed = std::sync::atomic::Ordering::Relaxed;
        for (at, word) in words.iter().enumerate() {
            region.words()[FIRST_CALL + at].store(*word, relaxed);
        }
        // Without a call that waits for another member, which never does anything here.
        region.words()[FIRST_CALL + 10].store(u32::MAX, relaxed);
        region.words()[POSTED].store(posted, relaxed);
        let mut member = member(&leader, 0);
        match member.next_call() {
            Ok(Some(call)) => {
                let mut values = [0.0; 4];
                let _ = member.read_inputs(call.input, &mut values);
                let _ = member.write_outputs(call.output, &values);
            }
            Ok(None) => prop_assert!(posted <= DEPTH),
            Err(violation) => prop_assert!(!violation.to_string().is_empty()),
        }
    }
}

fn hello() -> MemberHello {
    MemberHello {
        layout_hash: LAYOUT_HASH,
        release: "1.2.3".to_owned(),
        device: 1,
        devices: 2,
        split: WeightSplit::Outputs.code(),
        model: "/models/base.gguf".to_owned(),
        random_weights: None,
        files: [7; 32],
        cores: vec![2, 3],
        memory_bytes: 1 << 30,
    }
}

#[test]
fn the_start_of_a_member_goes_over_a_socket() {
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (ours, theirs) = pair.unwrap();
    let (leader_end, member_end) = (LeaderEnd::over(ours), MemberEnd::over(theirs));
    leader_end.send(&ToMember::Hello(hello()), &[]).unwrap();
    let (ToMember::Hello(heard), _) = member_end.receive().unwrap().unwrap() else { panic!("a hello") };
    assert_eq!(heard, hello());
    for message in [
        FromMember::Loading(GroupLoading { done: 1, total: 2 }),
        FromMember::Loaded(MemberLoaded { weight_bytes: 5 }),
        FromMember::Refused("no memory".to_owned()),
    ] {
        member_end.send(&message, &[]).unwrap();
        assert_eq!(leader_end.receive().unwrap().unwrap().0, message);
    }
    let leader = leader();
    let serve = ServeGroup { precision: 1, members: 2, input_values: 64, output_values: 32 };
    assert!(leader_end.send(&ToMember::Serve(serve), &[]).is_err(), "the region is missing");
    leader_end.send(&ToMember::Serve(serve), &[leader.fd().unwrap()]).unwrap();
    let (message, mut fds) = member_end.receive().unwrap().unwrap();
    assert_eq!(message, ToMember::Serve(serve));
    assert!(GroupMember::join(fds.pop().unwrap(), GEOMETRY, 0, SPIN).is_ok());
}

#[test]
fn a_member_of_another_release_or_with_other_files_refuses_by_name() {
    assert_eq!(hello().check("1.2.3", &[7; 32]), Ok(()));
    let refused = hello().check("1.2.4", &[7; 32]).unwrap_err();
    assert!(matches!(refused, MemberError::Release { device: 1, .. }));
    assert!(refused.to_string().contains("1.2.4") && refused.to_string().contains("1.2.3"));
    let layout = MemberHello { layout_hash: 1, ..hello() };
    assert!(matches!(layout.check("1.2.3", &[7; 32]), Err(MemberError::Release { .. })));
    let refused = hello().check("1.2.3", &[8; 32]).unwrap_err().to_string();
    assert!(refused.contains("/models/base.gguf") && refused.contains("restart the executor"), "{refused}");
    assert_eq!(
        [0, 1, 2].map(WeightSplit::from_code),
        [Some(WeightSplit::Outputs), Some(WeightSplit::Layers), None]
    );
}
