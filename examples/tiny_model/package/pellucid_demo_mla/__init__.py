"""The weights of demo-mla as package data; `pellucid chat demo-mla` finds this folder. MODEL.md says what they are."""
