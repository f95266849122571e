"""What people see of a running server: requests in flight, recent answers, and the state of all
specialists, computed once a second for everybody who looks."""
