//! Adapters that belong to one tenant.

use gateway::{adapters::AdapterError, caller::Role};
use ids::TenantId;

use crate::support::{BASE, Bench, caller};

async fn load_for(bench: &Bench, name: &str, weights: &str, tenant: &str) -> Result<(), AdapterError> {
    let mut request = bench.request(name, weights);
    request.tenant = Some(tenant.to_owned());
    bench.registry.load(request, BASE).await.map(drop)
}

#[tokio::test]
async fn a_private_adapter_is_there_for_its_tenant_and_for_administrators_alone() {
    let bench = Bench::with_room_for(4).await;
    load_for(&bench, "private", "w", "alice").await.unwrap();
    let sees = |tenant, role| bench.registry.lease("private", &caller(tenant, role)).unwrap().is_some();
    assert!(sees("alice", Role::User));
    assert!(sees("operator", Role::Admin));
    assert!(!sees("bob", Role::User));
    assert!(!sees("bob", Role::Metrics));
    let bench = bench.reopen().await;
    assert!(bench.registry.lease("private", &caller("bob", Role::User)).unwrap().is_none());
}

#[tokio::test]
async fn the_same_bytes_of_two_tenants_share_nothing() {
    let bench = Bench::with_room_for(4).await;
    load_for(&bench, "a", "same", "alice").await.unwrap();
    load_for(&bench, "b", "same", "bob").await.unwrap();
    let (alice, bob) = (TenantId::of(Some("alice")), TenantId::of(Some("bob")));
    assert!(bench.fake.holds(alice, "same") && bench.fake.holds(bob, "same"));
    assert_eq!((bench.fake.held(), bench.stored().len()), (2, 2));
    bench.registry.unload("a", None).await.unwrap();
    assert!(!bench.fake.holds(alice, "same") && bench.fake.holds(bob, "same"));
}

#[tokio::test]
async fn two_names_of_one_tenant_share_one_copy_until_the_second_goes() {
    let bench = Bench::with_room_for(4).await;
    load_for(&bench, "a", "same", "alice").await.unwrap();
    load_for(&bench, "b", "same", "alice").await.unwrap();
    assert_eq!((bench.fake.held(), bench.stored().len()), (1, 1));
    assert_eq!(bench.registry.unload("a", None).await.unwrap(), 0, "b needs it");
    assert_eq!(bench.registry.unload("b", None).await.unwrap(), 1000);
    assert_eq!((bench.fake.held(), bench.stored().len()), (0, 0));
}

#[tokio::test]
async fn replacing_keeps_the_owner_and_never_gives_it_to_somebody_else() {
    let bench = Bench::with_room_for(4).await;
    load_for(&bench, "a", "one", "alice").await.unwrap();
    bench.load("a", "two").await.unwrap();
    assert_eq!(bench.registry.entries()["a"].record.tenant.as_deref(), Some("alice"));
    assert!(matches!(load_for(&bench, "a", "three", "bob").await, Err(AdapterError::OtherTenant(_))));
    for tenant in ["", "a b", "../x", &"t".repeat(65)] {
        assert!(
            matches!(load_for(&bench, "b", "w", tenant).await, Err(AdapterError::BadTenant(_))),
            "{tenant}"
        );
    }
}
